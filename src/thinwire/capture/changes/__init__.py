"""What local steps have changed in the parameters."""
