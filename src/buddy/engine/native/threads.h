/* A pool of threads that meet at a spinning barrier: one decode step has hundreds of short stages. */

#ifndef BUDDY_THREADS_H
#define BUDDY_THREADS_H

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

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
/* Spins before an idle worker goes to sleep: about as long as sampling takes between two steps. */
#define SPINS_IDLE 20000

typedef struct Pool Pool;
typedef void (*Job)(void *argument, Pool *pool, int thread);

struct Pool {
    int count; /* threads, the caller's included */
    pthread_t *workers;
    atomic_int arrived;
    atomic_int phase;
    atomic_int dozing; /* threads that sleep at the barrier */
    atomic_uint ticket; /* of the newest job */
    atomic_int sleepers;
    atomic_int stopped;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    Job job;
    void *argument;
};

typedef struct {
    Pool *pool;
    int thread;
} Seat;

/* Sleep until the phase is another one, or be woken for nothing. */
static void doze(Pool *pool, int phase)
{
#if defined(__linux__)
    atomic_fetch_add(&pool->dozing, 1);
    syscall(SYS_futex, &pool->phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
    atomic_fetch_sub(&pool->dozing, 1);
#else
    (void)pool, (void)phase;
    sched_yield();
#endif
}

static void barrier(Pool *pool)
{
    if (pool->count == 1)
        return;
    int phase = atomic_load_explicit(&pool->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&pool->arrived, 1, memory_order_acq_rel) == pool->count - 1) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        atomic_store(&pool->phase, phase + 1);
#if defined(__linux__)
        if (atomic_load(&pool->dozing) > 0)
            syscall(SYS_futex, &pool->phase, FUTEX_WAKE_PRIVATE, pool->count, NULL, NULL, 0);
#endif
        return;
    }
    for (int spins = 0; atomic_load_explicit(&pool->phase, memory_order_acquire) == phase;) {
        RELAX();
        if (++spins > SPINS_AT_BARRIER) {
            doze(pool, phase);
            spins = 0;
        }
    }
}

static void *work(void *argument)
{
    Seat seat = *(Seat *)argument;
    free(argument);
    Pool *pool = seat.pool;
    unsigned done = 0;
    for (;;) {
        for (int spins = 0; spins < SPINS_IDLE; spins++) {
            if (atomic_load_explicit(&pool->ticket, memory_order_acquire) != done)
                break;
            RELAX();
        }
        if (atomic_load(&pool->ticket) == done) {
            pthread_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->sleepers, 1);
            while (atomic_load(&pool->ticket) == done)
                pthread_cond_wait(&pool->wake, &pool->mutex);
            atomic_fetch_sub(&pool->sleepers, 1);
            pthread_mutex_unlock(&pool->mutex);
        }
        done = atomic_load_explicit(&pool->ticket, memory_order_acquire);
        if (atomic_load(&pool->stopped))
            return NULL;
        pool->job(pool->argument, pool, seat.thread);
        barrier(pool);
    }
}

/* Run a job on every thread of the pool; returns when all are done. */
static void run_job(Pool *pool, Job job, void *argument)
{
    if (pool->count == 1) {
        job(argument, pool, 0);
        return;
    }
    pool->job = job;
    pool->argument = argument;
    atomic_fetch_add(&pool->ticket, 1);
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
    job(argument, pool, 0);
    barrier(pool);
}

void buddy_pool_free(Pool *pool)
{
    if (pool->count > 1) {
        atomic_store(&pool->stopped, 1);
        pthread_mutex_lock(&pool->mutex);
        atomic_fetch_add(&pool->ticket, 1);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
        for (int worker = 0; worker < pool->count - 1; worker++)
            pthread_join(pool->workers[worker], NULL);
    }
    free(pool->workers);
    free(pool);
}

/* NULL if a thread could not be started. */
Pool *buddy_pool_new(int count)
{
    Pool *pool = calloc(1, sizeof *pool);
    if (pool == NULL)
        return NULL;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->workers = calloc((size_t)count, sizeof *pool->workers);
    pool->count = 1;
    for (int thread = 1; thread < count && pool->workers != NULL; thread++) {
        Seat *seat = malloc(sizeof *seat);
        if (seat == NULL)
            break;
        *seat = (Seat){pool, thread};
        if (pthread_create(&pool->workers[thread - 1], NULL, work, seat) != 0) {
            free(seat);
            break;
        }
        pool->count++;
    }
    if (pool->count < count) {
        buddy_pool_free(pool);
        return NULL;
    }
    return pool;
}

/* The share of `total` that falls to a thread, in pieces of `grain`. */
static void share_of(int total, int grain, Pool *pool, int thread, int *begin, int *end)
{
    int pieces = (total + grain - 1) / grain;
    *begin = (int)((int64_t)pieces * thread / pool->count) * grain;
    *end = (int)((int64_t)pieces * (thread + 1) / pool->count) * grain;
    if (*begin > total)
        *begin = total;
    if (*end > total)
        *end = total;
}

#endif
