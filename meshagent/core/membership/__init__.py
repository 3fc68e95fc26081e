"""Who is alive: SWIM with the Lifeguard extensions."""
