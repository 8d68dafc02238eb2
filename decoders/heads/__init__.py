"""Networks beside a target that draft for it, one file each, with the files that they come in: Medusa, EAGLE, EAGLE-3, DFlash."""
