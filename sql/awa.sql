\ir state.sql
\ir code.sql
