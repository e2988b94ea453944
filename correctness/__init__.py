"""What is checked by machine beyond tests of examples."""
