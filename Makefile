.PHONY: check format lint types imports test wheels

check: lint types imports test

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

test:
	python -m pytest -n auto --dist worksteal

# One for each kind of machine, with the kernel in it, and one that runs anywhere. Debian's cross
# compiler is in the package gcc-aarch64-linux-gnu.
wheels:
	python -m hatchling build -t sdist -t wheel
	BUDDY_KERNELS=x86_64 python -m hatchling build -t wheel
	BUDDY_KERNELS=aarch64 CC=aarch64-linux-gnu-gcc python -m hatchling build -t wheel
