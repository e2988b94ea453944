-- Run once, in this order.
\ir foundation/types.sql
\ir foundation/ring_partitions.sql
\ir foundation/tables.sql
\ir control/tables.sql
\ir queue/tables.sql
\ir deferred/tables.sql
\ir execution/tables.sql
