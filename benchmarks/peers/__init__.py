"""The same tasks by Drivetrain, Lightning, the Hugging Face Trainer, Accelerate and plain PyTorch."""
