"""What this project trains: its data, its model, its task."""
