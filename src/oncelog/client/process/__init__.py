"""The consume-transform-produce loop, `oncelog.process`: each record is processed once, in a transaction."""
