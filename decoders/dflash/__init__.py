"""DFlash draft models: the network beside the target, and the files it comes in."""
