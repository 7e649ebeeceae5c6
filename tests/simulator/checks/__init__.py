"""What must hold in every schedule: the audit, and what a violation tells."""
