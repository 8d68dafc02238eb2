"""Training of drafters by one trainer: Medusa heads, EAGLE-3 heads, DFlash block draft models, and draft models.

:mod:`.recipes` has the settings, :mod:`.trainer` the loop, :mod:`.texts` the training text. Each kind of network has its own file.
This file imports nothing, because the command line reads the recipes before it needs torch. Decoding does not use this package.
"""
