"""What is run: named workloads, from which agreement, benchmarks and tuning take their shapes.

`kernels` are single calls of the attention, `towers` calls of whole towers on `photographs`,
`scale` folders of them.
`arrays` carries inputs from one framework to another, bit by bit.
"""
