"""`python -m buddy` is `buddy`."""

from buddy.cli.main import main

main()
