"""What a run will need, computed before anything of it is loaded."""
