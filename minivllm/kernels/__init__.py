"""Triton forms of the operations, one file a topic, with the names and signatures of `ops/`.

Owns the GPU's kernels. Never decides when one is used: `ops/table.py` does, from the list in
`entries.py`. Every kernel is compared with its torch form. Lesson 13.
"""
