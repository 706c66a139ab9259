"""What runs in each container: one folder a room, and the modules that all rooms share."""
