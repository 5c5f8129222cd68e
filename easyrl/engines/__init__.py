"""Training stacks behind one seam, ``easyrl.engines.base.TrainEngine``."""
