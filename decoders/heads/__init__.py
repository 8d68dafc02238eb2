"""Networks that draft for a target, one file each, and the reading and writing of their checkpoints: Medusa, EAGLE, EAGLE-3, DFlash."""
