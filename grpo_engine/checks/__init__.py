"""What the preflight looks at, one file a subject: model folder, prompts, rewards, memory. Torch-free."""
