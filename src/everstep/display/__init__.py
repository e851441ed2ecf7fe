"""Values as people read them: cells of tables, tables as HTML, charts as SVG; as strict JSON."""
