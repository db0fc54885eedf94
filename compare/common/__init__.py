"""What all rooms share; importing it imports neither framework.

`result_files` holds records and the JSON files of them, `console` prints tables and progress,
`environment` knows the machine, `processes` are those that a function or each GPU has to itself, or
many items share,
`errors` are those that a person at the command line can put right.
"""
