"""Layers of the decoder: thin modules that hold weights and call the op table.

Each weight carries its own `weight_loader`, so that the loader needs no table of shapes.
"""
