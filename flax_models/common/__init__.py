"""What both towers share, in NumPy alone."""
