.PHONY: check format lint types imports test wheels

check: lint imports
	$(MAKE) -j2 types test

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

# Checking the shape of every array doubles the time of tests that compare numbers: what they call is
# checked by all others.
UNCHECKED = tests/real tests/parity tests/product/generation tests/product/importance

test:
	python -m pytest -n auto --dist worksteal $(UNCHECKED:%=--ignore=%)
	python -m pytest -n auto --dist worksteal -o addopts="-ra --strict-markers" $(UNCHECKED)

# One for each kind of machine, with the kernel in it, and one that runs anywhere. Debian's cross
# compiler is in the package gcc-aarch64-linux-gnu.
wheels:
	python -m hatchling build -t sdist -t wheel
	BUDDY_KERNELS=x86_64 python -m hatchling build -t wheel
	BUDDY_KERNELS=aarch64 CC=aarch64-linux-gnu-gcc python -m hatchling build -t wheel
