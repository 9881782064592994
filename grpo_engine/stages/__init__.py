"""The parts of a recipe: supervised fine-tuning and reinforcement learning. Each is a loop over ready-made parts."""
