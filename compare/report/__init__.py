"""Reports, charts and tables from result files."""
