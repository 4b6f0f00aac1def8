CREATE TABLE transom_revision (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT transom_revision_pkc PRIMARY KEY (version_num)
);
CREATE TABLE jobs (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	version BIGINT NOT NULL, 
	name TEXT NOT NULL, 
	user TEXT NOT NULL, 
	uid BIGINT NOT NULL, 
	spec JSON NOT NULL, 
	run_dir TEXT NOT NULL, 
	cwd TEXT NOT NULL, 
	token_sha256 TEXT NOT NULL, 
	state TEXT NOT NULL, 
	reason TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	changed_at DOUBLE NOT NULL, 
	attempt BIGINT NOT NULL, 
	epoch BIGINT NOT NULL, 
	cancel_requested_by TEXT NOT NULL, 
	finished_at DOUBLE, 
	data JSON NOT NULL, 
	CONSTRAINT ck_jobs_attempt CHECK (attempt >= 0), 
	CONSTRAINT ck_jobs_epoch CHECK (epoch >= 0), 
	CONSTRAINT ck_jobs_version CHECK (version >= 1)
);
CREATE INDEX ix_jobs_state_id ON jobs (state, id);
CREATE INDEX ix_jobs_user_id ON jobs (user, id);
CREATE TABLE attempts (
	job_id INTEGER NOT NULL, 
	number BIGINT NOT NULL, 
	tag TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	slurm_job_id BIGINT, 
	slurm_submit_time DOUBLE, 
	nodes JSON NOT NULL, 
	excluded JSON NOT NULL, 
	barred JSON NOT NULL, 
	generation BIGINT NOT NULL, 
	started_at DOUBLE, 
	ended_at DOUBLE, 
	end_reason TEXT NOT NULL, 
	data JSON NOT NULL, 
	CONSTRAINT pk_attempts PRIMARY KEY (job_id, number), 
	CONSTRAINT ck_attempts_generation CHECK (generation >= 0), 
	CONSTRAINT fk_attempts_job_id FOREIGN KEY(job_id) REFERENCES jobs (id), 
	CONSTRAINT uq_attempts_slurm_job_id_slurm_submit_time UNIQUE (slurm_job_id, slurm_submit_time), 
	CONSTRAINT uq_attempts_tag UNIQUE (tag)
);
CREATE TABLE launches (
	job_id INTEGER NOT NULL, 
	epoch BIGINT NOT NULL, 
	attempt BIGINT NOT NULL, 
	nodes JSON NOT NULL, 
	started_at DOUBLE NOT NULL, 
	ended_at DOUBLE, 
	resume_step BIGINT, 
	first_step_at DOUBLE, 
	first_step BIGINT, 
	last_step BIGINT, 
	last_step_at DOUBLE, 
	end_reason TEXT NOT NULL, 
	CONSTRAINT pk_launches PRIMARY KEY (job_id, epoch), 
	CONSTRAINT fk_launches_job_id_attempt FOREIGN KEY(job_id, attempt) REFERENCES attempts (job_id, number), 
	CONSTRAINT fk_launches_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE TABLE incidents (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	job_id INTEGER NOT NULL, 
	attempt BIGINT NOT NULL, 
	epoch BIGINT NOT NULL, 
	detected_at DOUBLE NOT NULL, 
	failure_class TEXT NOT NULL, 
	blame TEXT NOT NULL, 
	action TEXT NOT NULL, 
	nodes JSON NOT NULL, 
	ranks JSON NOT NULL, 
	confidence TEXT NOT NULL, 
	summary TEXT NOT NULL, 
	evidence JSON NOT NULL, 
	diagnosed_at DOUBLE, 
	fenced_at DOUBLE, 
	drained_at DOUBLE, 
	acted_at DOUBLE, 
	recovered_at DOUBLE, 
	closed_at DOUBLE, 
	last_step BIGINT, 
	data JSON NOT NULL, 
	CONSTRAINT fk_incidents_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX ix_incidents_job_id_id ON incidents (job_id, id);
CREATE TABLE intents (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	"key" TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	state TEXT NOT NULL, 
	created_at DOUBLE NOT NULL, 
	job_id INTEGER, 
	incident_id INTEGER, 
	args JSON NOT NULL, 
	tries BIGINT NOT NULL, 
	not_before DOUBLE NOT NULL, 
	finished_at DOUBLE, 
	outcome JSON NOT NULL, 
	CONSTRAINT ck_intents_state CHECK (state IN ('pending', 'done', 'failed', 'dropped')), 
	CONSTRAINT ck_intents_tries CHECK (tries >= 0), 
	CONSTRAINT fk_intents_incident_id FOREIGN KEY(incident_id) REFERENCES incidents (id), 
	CONSTRAINT fk_intents_job_id FOREIGN KEY(job_id) REFERENCES jobs (id), 
	CONSTRAINT uq_intents_key UNIQUE ("key")
);
CREATE INDEX ix_intents_job_id_id ON intents (job_id, id);
CREATE INDEX ix_intents_state_id ON intents (state, id);
CREATE TABLE events (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at DOUBLE NOT NULL, 
	kind TEXT NOT NULL, 
	message TEXT NOT NULL, 
	job_id INTEGER, 
	node TEXT, 
	data JSON NOT NULL, 
	CONSTRAINT fk_events_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX ix_events_job_id_id ON events (job_id, id);
CREATE INDEX ix_events_node_id ON events (node, id);
CREATE TABLE nodes (
	name TEXT NOT NULL, 
	changed_at DOUBLE NOT NULL, 
	drain_reason TEXT NOT NULL, 
	drain_user TEXT NOT NULL, 
	drain_time DOUBLE, 
	incident_id INTEGER, 
	checked_at DOUBLE, 
	checks JSON NOT NULL, 
	data JSON NOT NULL, 
	CONSTRAINT pk_nodes PRIMARY KEY (name), 
	CONSTRAINT fk_nodes_incident_id FOREIGN KEY(incident_id) REFERENCES incidents (id)
);
CREATE TABLE checkpoints (
	job_id INTEGER NOT NULL, 
	step BIGINT NOT NULL, 
	epoch BIGINT NOT NULL, 
	stage TEXT NOT NULL, 
	at DOUBLE NOT NULL, 
	path TEXT NOT NULL, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (job_id, step, epoch), 
	CONSTRAINT ck_checkpoints_step CHECK (step >= 0), 
	CONSTRAINT fk_checkpoints_job_id FOREIGN KEY(job_id) REFERENCES jobs (id)
);
-- rows
INSERT INTO "transom_revision" ("version_num") VALUES ('r0001_pre');
INSERT INTO "jobs" ("id", "version", "name", "user", "uid", "spec", "run_dir", "cwd", "token_sha256", "state", "reason", "created_at", "changed_at", "attempt", "epoch", "cancel_requested_by", "finished_at", "data") VALUES (1, 2, 'tinylm', 'ann', 1001, '{"nodes": 4, "watch": {"stall_after_s": 600.5}}', '/h/.transom/1', '/h/ann', '9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f', 'queued', 'waits', 1700000000.0, 1700000000.0, 0, 0, '', NULL, '{}');
INSERT INTO "jobs" ("id", "version", "name", "user", "uid", "spec", "run_dir", "cwd", "token_sha256", "state", "reason", "created_at", "changed_at", "attempt", "epoch", "cancel_requested_by", "finished_at", "data") VALUES (2, 1, 'größer ☃', 'bob', 1002, '{"nodes": 4, "watch": {"stall_after_s": 600.5}}', '/h/.transom/1', '/h/ann', '9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f', 'queued', 'waits', 1700000000.0, 1700000000.0, 0, 0, '', NULL, '{"x": [1, null, "\u00e9"]}');
INSERT INTO "attempts" ("job_id", "number", "tag", "created_at", "slurm_job_id", "slurm_submit_time", "nodes", "excluded", "barred", "generation", "started_at", "ended_at", "end_reason", "data") VALUES (1, 1, 'transom:1:1', 1700000000.0, 77, 1700000000.0, '["n1", "n2", "n3", "n4"]', '[]', '["n3"]', 0, NULL, NULL, '', '{}');
INSERT INTO "launches" ("job_id", "epoch", "attempt", "nodes", "started_at", "ended_at", "resume_step", "first_step_at", "first_step", "last_step", "last_step_at", "end_reason") VALUES (1, 1, 1, '["n1", "n2", "n3"]', 1700000004.0, 1700000050.0, NULL, NULL, NULL, NULL, NULL, '');
INSERT INTO "launches" ("job_id", "epoch", "attempt", "nodes", "started_at", "ended_at", "resume_step", "first_step_at", "first_step", "last_step", "last_step_at", "end_reason") VALUES (1, 2, 1, '["n1", "n2", "n4"]', 1700000059.0, NULL, 40, NULL, NULL, NULL, NULL, '');
INSERT INTO "incidents" ("id", "job_id", "attempt", "epoch", "detected_at", "failure_class", "blame", "action", "nodes", "ranks", "confidence", "summary", "evidence", "diagnosed_at", "fenced_at", "drained_at", "acted_at", "recovered_at", "closed_at", "last_step", "data") VALUES (1, 1, 1, 1, 1700000050.0, 'host', 'node', 'drain', '["n3"]', '[2]', 'high', 'n3 does not answer', '[{"file": "rank3.log", "line": 812, "text": "NCCL WARN \u2026 \u2018peer\u2019\tgone \u001b[0m", "role": "root"}]', 1700000051.0, NULL, NULL, NULL, NULL, NULL, NULL, '{}');
INSERT INTO "intents" ("id", "key", "kind", "state", "created_at", "job_id", "incident_id", "args", "tries", "not_before", "finished_at", "outcome") VALUES (1, 'submit:1:1', 'submit', 'done', 1700000000.0, 1, NULL, '{"tag": "transom:1:1"}', 0, 0.0, 1700000001.0, '{"slurm_job_id": 77, "at": 1700000000.25}');
INSERT INTO "intents" ("id", "key", "kind", "state", "created_at", "job_id", "incident_id", "args", "tries", "not_before", "finished_at", "outcome") VALUES (2, 'drain:n3:1', 'drain', 'pending', 1700000000.0, 1, 1, '{"node": "n3", "reason": "transom[1.1] n3"}', 1, 1700000099.0, NULL, '{"error": "slurmctld does not answer"}');
INSERT INTO "intents" ("id", "key", "kind", "state", "created_at", "job_id", "incident_id", "args", "tries", "not_before", "finished_at", "outcome") VALUES (3, 'submit:2:1', 'submit', 'failed', 1700000000.0, 2, NULL, '{}', 0, 0.0, 1700000007.0, '{"error": "invalid partition"}');
INSERT INTO "intents" ("id", "key", "kind", "state", "created_at", "job_id", "incident_id", "args", "tries", "not_before", "finished_at", "outcome") VALUES (4, 'submit:2:2', 'submit', 'pending', 1700000000.0, 2, NULL, '{}', 0, 0.0, NULL, '{}');
INSERT INTO "events" ("id", "at", "kind", "message", "job_id", "node", "data") VALUES (1, 1700000000.0, 'submitted', 'ann submitted tinylm', 1, NULL, '{}');
INSERT INTO "events" ("id", "at", "kind", "message", "job_id", "node", "data") VALUES (2, 1700000050.0, 'verdict', 'n3: host', 1, 'n3', '{"loss": 2.5}');
INSERT INTO "nodes" ("name", "changed_at", "drain_reason", "drain_user", "drain_time", "incident_id", "checked_at", "checks", "data") VALUES ('n3', 1700000050.0, '', '', NULL, 1, NULL, '[{"check": "xid", "result": "unfit", "value": 79}]', '{}');
INSERT INTO "checkpoints" ("job_id", "step", "epoch", "stage", "at", "path") VALUES (1, 40, 1, 'storage', 1700000047.0, '/h/ann/ck/40');
INSERT INTO "checkpoints" ("job_id", "step", "epoch", "stage", "at", "path") VALUES (1, 20, 1, 'memory', 1700000041.0, '');
CREATE TRIGGER events_no_update BEFORE UPDATE ON events
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_no_delete BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_no_replace BEFORE INSERT ON events WHEN EXISTS (SELECT 1 FROM events WHERE id = NEW.id)
    BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
