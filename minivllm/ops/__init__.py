"""Operations of the model: one file a topic, the plain torch form first.

The torch forms are the specification: every faster form has the same signature and is compared
with them. `table.py` is the one place where a form is chosen.
"""
