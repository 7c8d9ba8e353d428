"Models for tasks: encoders with heads, losses, evaluation and predictions."
