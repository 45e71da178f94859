"""What the strategies for both of Lightning's packages are made of."""
