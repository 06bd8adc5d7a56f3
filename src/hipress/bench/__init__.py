"""The report room: measuring, tables, and the eager-torch yardstick the benches compare with."""
