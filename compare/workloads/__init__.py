"""What they are run on."""
