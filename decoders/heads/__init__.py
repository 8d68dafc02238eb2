"""Networks that draft for a target (Medusa, EAGLE, EAGLE-3, DFlash), and functions that load and save their checkpoints."""
