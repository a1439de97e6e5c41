"""What a run builds of a model: its plan, its skeleton, and checks of model types without a row in the table."""
