.PHONY: check format lint types imports test

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
