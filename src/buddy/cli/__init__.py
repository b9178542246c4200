"""The command line: one subcommand a file. Nothing heavy is imported before a command runs."""
