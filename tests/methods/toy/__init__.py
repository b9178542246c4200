"""A method in a package of its own: the code of the how-to in docs/design.md."""
