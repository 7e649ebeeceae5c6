"""What becomes of the records of "Training Through Failure": claims, tables and figures."""
