/* The threads of a step are torch's own OpenMP team, which meets at a spinning barrier here: a step
 * has hundreds of short stages. A pool beside torch's would share the cores with one that spins. */

#ifndef BUDDY_THREADS_H
#define BUDDY_THREADS_H

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#else
#define RELAX() ((void)0)
#endif

/* Spins before a thread that waits gives its core away: the one it waits for may have none. */
#define SPINS_AT_BARRIER 4000

/* What is called of OpenMP, found where torch found it. */
typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned); /* GOMP_parallel */
    int (*thread)(void);                                            /* omp_get_thread_num */
    int (*threads)(void);                                           /* omp_get_num_threads */
} OpenMP;

/* Queues of work between two barriers are at most half as many. */
#define QUEUES 16

typedef struct Team Team;
typedef void (*Job)(void *argument, Team *team, int thread);

struct Team {
    const OpenMP *openmp;
    atomic_int count; /* threads, the caller's included */
    atomic_int arrived;
    atomic_int phase;
    atomic_int dozing; /* threads that sleep at the barrier */
    atomic_int taken[QUEUES];
    Job job;
    void *argument;
};

static inline int size_of(Team *team)
{
    return atomic_load_explicit(&team->count, memory_order_relaxed);
}

/* Sleep until the phase is another one, or be woken for nothing. */
static void doze(Team *team, int phase)
{
#if defined(__linux__)
    atomic_fetch_add(&team->dozing, 1);
    syscall(SYS_futex, &team->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
    atomic_fetch_sub(&team->dozing, 1);
#else
    (void)team, (void)phase;
    sched_yield();
#endif
}

static void barrier(Team *team)
{
    int count = size_of(team);
    if (count == 1)
        return;
    int phase = atomic_load_explicit(&team->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == count - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store(&team->phase, phase + 1);
#if defined(__linux__)
        if (atomic_load(&team->dozing) > 0)
            syscall(SYS_futex, &team->phase, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#endif
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->phase, memory_order_acquire) == phase;) {
        RELAX();
        if (++spins > SPINS_AT_BARRIER) {
            doze(team, phase);
            spins = 0;
        }
    }
}

static void join_team(void *argument)
{
    Team *team = argument;
    /* OpenMP may grant fewer threads than were asked for; all of them store the same. */
    atomic_store_explicit(&team->count, team->openmp->threads(), memory_order_relaxed);
    team->job(team->argument, team, team->openmp->thread());
}

/* Run a job on as many threads, or fewer; returns when all are done. */
static void run_job(const OpenMP *openmp, int threads, Job job, void *argument)
{
    Team team = {.openmp = openmp, .job = job, .argument = argument};
    openmp->parallel(join_team, &team, (unsigned)threads, 0);
}

/* Work that threads take piece by piece, since one core may be slower than another. All threads open
 * the same queues in the same order, each with a count of its own. */
typedef struct {
    atomic_int *taken;
    int total, piece;
} Queue;

static inline Queue open_queue(Team *team, unsigned *opened, int total, int piece)
{
    unsigned here = (*opened)++;
    /* Of a barrier before: everybody has left it. Nobody opens it before the next. */
    atomic_store_explicit(&team->taken[(here + QUEUES / 2) % QUEUES], 0, memory_order_relaxed);
    return (Queue){&team->taken[here % QUEUES], total, piece};
}

/* The next piece; 0 where none is left. */
static inline int take_piece(Queue *queue, int *begin, int *end)
{
    *begin = atomic_fetch_add_explicit(queue->taken, queue->piece, memory_order_relaxed);
    *end = *begin + queue->piece < queue->total ? *begin + queue->piece : queue->total;
    return *begin < queue->total;
}

/* The share of `total` that falls to a thread, in pieces of `grain`. */
static void share_of(int total, int grain, Team *team, int thread, int *begin, int *end)
{
    int pieces = (total + grain - 1) / grain, count = size_of(team);
    *begin = (int)((int64_t)pieces * thread / count) * grain;
    *end = (int)((int64_t)pieces * (thread + 1) / count) * grain;
    if (*begin > total)
        *begin = total;
    if (*end > total)
        *end = total;
}

#endif
