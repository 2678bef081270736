"""Inputs that nobody meant, for everything that reads what comes from outside.

A *target* feeds one input (bytes) to the code and raises if what follows is not allowed. A
*worker* process mutates inputs for one target; the *campaign* starts workers, watches them for
crashes and hangs, and prints a table. See `fuzz/README.md`.
"""
