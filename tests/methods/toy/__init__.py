"""A method in a package of its own: the code of the how-to in docs/how-to/extend.md."""
