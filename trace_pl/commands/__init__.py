"""The command line's entry and its commands; each imports what it needs when it is asked to run."""
