"""Values as people read them: cells of tables, tables as HTML, strict JSON."""
