"""Training of drafters by one trainer: Medusa heads, EAGLE-3 heads, DFlash block draft models, and draft models.

:mod:`.recipes` defines the settings, :mod:`.trainer` the loop, :mod:`.texts` the training text. Each kind of network has its own file.
This file imports nothing, so that the command line can import the recipes without torch. Decoding does not use this package.
"""
