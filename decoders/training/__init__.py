"""Everything that is trained here besides the demo models: Medusa heads, EAGLE-3 heads and draft models, by one trainer.

:mod:`.recipes` has the settings, :mod:`.trainer` the loop, :mod:`.texts` the training text; each other file trains one kind of
network. Nothing is imported here, because the command line reads the recipes before it needs torch. Decoding needs none of this.
"""
