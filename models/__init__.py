"""Model families behind one stage facade."""
