"""What people read: tables and explanations."""
