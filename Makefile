.PHONY: check format lint types imports docs test fuzz soak sanitize wheels

check: lint imports
	$(MAKE) -j2 docs types test

format:
	ruff format .
	ruff check --fix .

lint:
	ruff format --check .
	ruff check .

types:
	mypy

imports:
	lint-imports

# The site, in site/; a broken link, a page outside the navigation or a wrong reference ends it.
docs:
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict

test:
	python -m pytest -n auto --dist worksteal

# New examples of each fuzzer: 100,000 take about an hour on a core.
FUZZ ?= 100000
fuzz:
	BUDDY_FUZZ=$(FUZZ) python -m pytest -p no:cacheprovider tests/hostile/fuzz

# Clients of every kind at 1.2 times what a server can do, for so many seconds; what it saw is printed.
SOAK ?= 600
soak:
	BUDDY_SOAK=$(SOAK) python -m pytest -s -p no:cacheprovider tests/hostile/test_soak.py

# The decode kernel under AddressSanitizer and UndefinedBehaviorSanitizer, by all instruction sets
# that this machine has; the kernels go to a cache of their own.
SANITIZED ?= $(addprefix tests/product/engine/test_,native.py multiply.py lanes.py instructions.py)
sanitize:
	mkdir -p build/sanitize
	CC=$(CURDIR)/.ci/sanitizing-gcc BUDDY_HOME=$(CURDIR)/build/sanitize OMP_NUM_THREADS=2 ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	python -m pytest -p no:cacheprovider -s $(SANITIZED)

# One for each kind of machine, with the kernel in it, and one that runs anywhere. Debian's cross
# compiler is in the package gcc-aarch64-linux-gnu.
wheels:
	python -m hatchling build -t sdist -t wheel
	BUDDY_KERNELS=x86_64 python -m hatchling build -t wheel
	BUDDY_KERNELS=aarch64 CC=aarch64-linux-gnu-gcc python -m hatchling build -t wheel
