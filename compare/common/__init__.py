"""What all rooms share: console, environment, errors, result files."""
