"""What a worker takes from its backward pass, or from its steps, to hand to a reducer."""
