"""Kernels and towers under stress: hostile input, many threads, much of everything.

`checks` lists the checks, runs them and prints the table. `kernels` has those of kernels, on the
`inputs` drawn for them; `subjects` are the kernels as they are called there, with `guards` around
their tensors, and `launched` tells which of them a call reached. `server` is a tower's life under
calls from many threads.
"""
