"""The front end: program text in, checked values out."""
