"""Everything that is trained here besides the demo models: Medusa heads, EAGLE-3 heads and draft models, by one trainer.

:mod:`.recipes` are the settings, :mod:`.trainer` the loop, :mod:`.texts` what is learnt from; the rest is a file for each thing that is
trained. Nothing is imported here, because the command line reads the recipes before it needs torch. Decoding needs none of this.
"""
