--
-- PostgreSQL database dump
--


-- Dumped from database version 15.18 (Debian 15.18-0+deb12u1)
-- Dumped by pg_dump version 15.18 (Debian 15.18-0+deb12u1)

SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;

--
-- Name: events_append_only(); Type: FUNCTION; Schema: public; Owner: -
--

CREATE FUNCTION public.events_append_only() RETURNS trigger
    LANGUAGE plpgsql
    AS $$ BEGIN RAISE EXCEPTION 'events are append-only'; END $$;


SET default_tablespace = '';

SET default_table_access_method = heap;

--
-- Name: attempts; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.attempts (
    job_id bigint NOT NULL,
    number bigint NOT NULL,
    tag text NOT NULL,
    created_at double precision NOT NULL,
    slurm_job_id bigint,
    slurm_submit_time double precision,
    nodes json NOT NULL,
    excluded json NOT NULL,
    barred json NOT NULL,
    generation bigint NOT NULL,
    started_at double precision,
    ended_at double precision,
    end_reason text NOT NULL,
    data json NOT NULL,
    CONSTRAINT ck_attempts_generation CHECK ((generation >= 0))
);


--
-- Name: checkpoints; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.checkpoints (
    job_id bigint NOT NULL,
    step bigint NOT NULL,
    epoch bigint NOT NULL,
    stage text NOT NULL,
    at double precision NOT NULL,
    path text NOT NULL,
    CONSTRAINT ck_checkpoints_step CHECK ((step >= 0))
);


--
-- Name: events; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.events (
    id bigint NOT NULL,
    at double precision NOT NULL,
    kind text NOT NULL,
    message text NOT NULL,
    job_id bigint,
    node text,
    data json NOT NULL
);


--
-- Name: events_id_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.events_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: events_id_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.events_id_seq OWNED BY public.events.id;


--
-- Name: incidents; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.incidents (
    id bigint NOT NULL,
    job_id bigint NOT NULL,
    attempt bigint NOT NULL,
    epoch bigint NOT NULL,
    detected_at double precision NOT NULL,
    failure_class text NOT NULL,
    blame text NOT NULL,
    action text NOT NULL,
    nodes json NOT NULL,
    ranks json NOT NULL,
    confidence text NOT NULL,
    summary text NOT NULL,
    evidence json NOT NULL,
    diagnosed_at double precision,
    fenced_at double precision,
    drained_at double precision,
    acted_at double precision,
    recovered_at double precision,
    closed_at double precision,
    last_step bigint,
    data json NOT NULL
);


--
-- Name: incidents_id_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.incidents_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: incidents_id_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.incidents_id_seq OWNED BY public.incidents.id;


--
-- Name: intents; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.intents (
    id bigint NOT NULL,
    key text NOT NULL,
    kind text NOT NULL,
    state text NOT NULL,
    created_at double precision NOT NULL,
    job_id bigint,
    incident_id bigint,
    args json NOT NULL,
    tries bigint NOT NULL,
    not_before double precision NOT NULL,
    finished_at double precision,
    outcome json NOT NULL,
    CONSTRAINT ck_intents_state CHECK ((state = ANY (ARRAY['pending'::text, 'done'::text, 'failed'::text, 'dropped'::text]))),
    CONSTRAINT ck_intents_tries CHECK ((tries >= 0))
);


--
-- Name: intents_id_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.intents_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: intents_id_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.intents_id_seq OWNED BY public.intents.id;


--
-- Name: jobs; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.jobs (
    id bigint NOT NULL,
    version bigint NOT NULL,
    name text NOT NULL,
    "user" text NOT NULL,
    uid bigint NOT NULL,
    spec json NOT NULL,
    run_dir text NOT NULL,
    cwd text NOT NULL,
    token_sha256 text NOT NULL,
    state text NOT NULL,
    reason text NOT NULL,
    created_at double precision NOT NULL,
    changed_at double precision NOT NULL,
    attempt bigint NOT NULL,
    epoch bigint NOT NULL,
    cancel_requested_by text NOT NULL,
    finished_at double precision,
    data json NOT NULL,
    CONSTRAINT ck_jobs_attempt CHECK ((attempt >= 0)),
    CONSTRAINT ck_jobs_epoch CHECK ((epoch >= 0)),
    CONSTRAINT ck_jobs_version CHECK ((version >= 1))
);


--
-- Name: jobs_id_seq; Type: SEQUENCE; Schema: public; Owner: -
--

CREATE SEQUENCE public.jobs_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;


--
-- Name: jobs_id_seq; Type: SEQUENCE OWNED BY; Schema: public; Owner: -
--

ALTER SEQUENCE public.jobs_id_seq OWNED BY public.jobs.id;


--
-- Name: launches; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.launches (
    job_id bigint NOT NULL,
    epoch bigint NOT NULL,
    attempt bigint NOT NULL,
    nodes json NOT NULL,
    started_at double precision NOT NULL,
    ended_at double precision,
    resume_step bigint,
    first_step_at double precision,
    first_step bigint,
    last_step bigint,
    last_step_at double precision,
    end_reason text NOT NULL
);


--
-- Name: nodes; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.nodes (
    name text NOT NULL,
    changed_at double precision NOT NULL,
    drain_reason text NOT NULL,
    drain_user text NOT NULL,
    drain_time double precision,
    incident_id bigint,
    checked_at double precision,
    checks json NOT NULL,
    data json NOT NULL
);


--
-- Name: transom_revision; Type: TABLE; Schema: public; Owner: -
--

CREATE TABLE public.transom_revision (
    version_num character varying(32) NOT NULL
);


--
-- Name: events id; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.events ALTER COLUMN id SET DEFAULT nextval('public.events_id_seq'::regclass);


--
-- Name: incidents id; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.incidents ALTER COLUMN id SET DEFAULT nextval('public.incidents_id_seq'::regclass);


--
-- Name: intents id; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.intents ALTER COLUMN id SET DEFAULT nextval('public.intents_id_seq'::regclass);


--
-- Name: jobs id; Type: DEFAULT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.jobs ALTER COLUMN id SET DEFAULT nextval('public.jobs_id_seq'::regclass);


--
-- Data for Name: attempts; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.attempts (job_id, number, tag, created_at, slurm_job_id, slurm_submit_time, nodes, excluded, barred, generation, started_at, ended_at, end_reason, data) VALUES (1, 1, 'transom:1:1', 1700000000, 77, 1700000000, '["n1", "n2", "n3", "n4"]', '[]', '["n3"]', 0, NULL, NULL, '', '{}');


--
-- Data for Name: checkpoints; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.checkpoints (job_id, step, epoch, stage, at, path) VALUES (1, 40, 1, 'storage', 1700000047, '/h/ann/ck/40');
INSERT INTO public.checkpoints (job_id, step, epoch, stage, at, path) VALUES (1, 20, 1, 'memory', 1700000041, '');


--
-- Data for Name: events; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.events (id, at, kind, message, job_id, node, data) VALUES (1, 1700000000, 'submitted', 'ann submitted tinylm', 1, NULL, '{}');
INSERT INTO public.events (id, at, kind, message, job_id, node, data) VALUES (2, 1700000050, 'verdict', 'n3: host', 1, 'n3', '{"loss": 2.5}');


--
-- Data for Name: incidents; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.incidents (id, job_id, attempt, epoch, detected_at, failure_class, blame, action, nodes, ranks, confidence, summary, evidence, diagnosed_at, fenced_at, drained_at, acted_at, recovered_at, closed_at, last_step, data) VALUES (1, 1, 1, 1, 1700000050, 'host', 'node', 'drain', '["n3"]', '[2]', 'high', 'n3 does not answer', '[{"file": "rank3.log", "line": 812, "text": "NCCL WARN \u2026 \u2018peer\u2019\tgone \u001b[0m", "role": "root"}]', 1700000051, NULL, NULL, NULL, NULL, NULL, NULL, '{}');


--
-- Data for Name: intents; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.intents (id, key, kind, state, created_at, job_id, incident_id, args, tries, not_before, finished_at, outcome) VALUES (1, 'submit:1:1', 'submit', 'done', 1700000000, 1, NULL, '{"tag": "transom:1:1"}', 0, 0, 1700000001, '{"slurm_job_id": 77, "at": 1700000000.25}');
INSERT INTO public.intents (id, key, kind, state, created_at, job_id, incident_id, args, tries, not_before, finished_at, outcome) VALUES (2, 'drain:n3:1', 'drain', 'pending', 1700000000, 1, 1, '{"node": "n3", "reason": "transom[1.1] n3"}', 1, 1700000099, NULL, '{"error": "slurmctld does not answer"}');
INSERT INTO public.intents (id, key, kind, state, created_at, job_id, incident_id, args, tries, not_before, finished_at, outcome) VALUES (3, 'submit:2:1', 'submit', 'failed', 1700000000, 2, NULL, '{}', 0, 0, 1700000007, '{"error": "invalid partition"}');
INSERT INTO public.intents (id, key, kind, state, created_at, job_id, incident_id, args, tries, not_before, finished_at, outcome) VALUES (4, 'submit:2:2', 'submit', 'pending', 1700000000, 2, NULL, '{}', 0, 0, NULL, '{}');


--
-- Data for Name: jobs; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.jobs (id, version, name, "user", uid, spec, run_dir, cwd, token_sha256, state, reason, created_at, changed_at, attempt, epoch, cancel_requested_by, finished_at, data) VALUES (1, 2, 'tinylm', 'ann', 1001, '{"nodes": 4, "watch": {"stall_after_s": 600.5}}', '/h/.transom/1', '/h/ann', '9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f', 'queued', 'waits', 1700000000, 1700000000, 0, 0, '', NULL, '{}');
INSERT INTO public.jobs (id, version, name, "user", uid, spec, run_dir, cwd, token_sha256, state, reason, created_at, changed_at, attempt, epoch, cancel_requested_by, finished_at, data) VALUES (2, 1, 'größer ☃', 'bob', 1002, '{"nodes": 4, "watch": {"stall_after_s": 600.5}}', '/h/.transom/1', '/h/ann', '9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f9f', 'queued', 'waits', 1700000000, 1700000000, 0, 0, '', NULL, '{"x": [1, null, "\u00e9"]}');


--
-- Data for Name: launches; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.launches (job_id, epoch, attempt, nodes, started_at, ended_at, resume_step, first_step_at, first_step, last_step, last_step_at, end_reason) VALUES (1, 1, 1, '["n1", "n2", "n3"]', 1700000004, 1700000050, NULL, NULL, NULL, NULL, NULL, '');
INSERT INTO public.launches (job_id, epoch, attempt, nodes, started_at, ended_at, resume_step, first_step_at, first_step, last_step, last_step_at, end_reason) VALUES (1, 2, 1, '["n1", "n2", "n4"]', 1700000059, NULL, 40, NULL, NULL, NULL, NULL, '');


--
-- Data for Name: nodes; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.nodes (name, changed_at, drain_reason, drain_user, drain_time, incident_id, checked_at, checks, data) VALUES ('n3', 1700000050, '', '', NULL, 1, NULL, '[{"check": "xid", "result": "unfit", "value": 79}]', '{}');


--
-- Data for Name: transom_revision; Type: TABLE DATA; Schema: public; Owner: -
--

INSERT INTO public.transom_revision (version_num) VALUES ('r0001_pre');


--
-- Name: events_id_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.events_id_seq', 2, true);


--
-- Name: incidents_id_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.incidents_id_seq', 1, true);


--
-- Name: intents_id_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.intents_id_seq', 4, true);


--
-- Name: jobs_id_seq; Type: SEQUENCE SET; Schema: public; Owner: -
--

SELECT pg_catalog.setval('public.jobs_id_seq', 2, true);


--
-- Name: attempts pk_attempts; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.attempts
    ADD CONSTRAINT pk_attempts PRIMARY KEY (job_id, number);


--
-- Name: checkpoints pk_checkpoints; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.checkpoints
    ADD CONSTRAINT pk_checkpoints PRIMARY KEY (job_id, step, epoch);


--
-- Name: events pk_events; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.events
    ADD CONSTRAINT pk_events PRIMARY KEY (id);


--
-- Name: incidents pk_incidents; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.incidents
    ADD CONSTRAINT pk_incidents PRIMARY KEY (id);


--
-- Name: intents pk_intents; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.intents
    ADD CONSTRAINT pk_intents PRIMARY KEY (id);


--
-- Name: jobs pk_jobs; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT pk_jobs PRIMARY KEY (id);


--
-- Name: launches pk_launches; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.launches
    ADD CONSTRAINT pk_launches PRIMARY KEY (job_id, epoch);


--
-- Name: nodes pk_nodes; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.nodes
    ADD CONSTRAINT pk_nodes PRIMARY KEY (name);


--
-- Name: transom_revision transom_revision_pkc; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.transom_revision
    ADD CONSTRAINT transom_revision_pkc PRIMARY KEY (version_num);


--
-- Name: attempts uq_attempts_slurm_job_id_slurm_submit_time; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.attempts
    ADD CONSTRAINT uq_attempts_slurm_job_id_slurm_submit_time UNIQUE (slurm_job_id, slurm_submit_time);


--
-- Name: attempts uq_attempts_tag; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.attempts
    ADD CONSTRAINT uq_attempts_tag UNIQUE (tag);


--
-- Name: intents uq_intents_key; Type: CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.intents
    ADD CONSTRAINT uq_intents_key UNIQUE (key);


--
-- Name: ix_events_job_id_id; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_events_job_id_id ON public.events USING btree (job_id, id);


--
-- Name: ix_events_node_id; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_events_node_id ON public.events USING btree (node, id);


--
-- Name: ix_incidents_job_id_id; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_incidents_job_id_id ON public.incidents USING btree (job_id, id);


--
-- Name: ix_intents_job_id_id; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_intents_job_id_id ON public.intents USING btree (job_id, id);


--
-- Name: ix_intents_state_id; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_intents_state_id ON public.intents USING btree (state, id);


--
-- Name: ix_jobs_state_id; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_jobs_state_id ON public.jobs USING btree (state, id);


--
-- Name: ix_jobs_user_id; Type: INDEX; Schema: public; Owner: -
--

CREATE INDEX ix_jobs_user_id ON public.jobs USING btree ("user", id);


--
-- Name: events events_append_only; Type: TRIGGER; Schema: public; Owner: -
--

CREATE TRIGGER events_append_only BEFORE DELETE OR UPDATE OR TRUNCATE ON public.events FOR EACH STATEMENT EXECUTE FUNCTION public.events_append_only();


--
-- Name: attempts fk_attempts_job_id; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.attempts
    ADD CONSTRAINT fk_attempts_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);


--
-- Name: checkpoints fk_checkpoints_job_id; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.checkpoints
    ADD CONSTRAINT fk_checkpoints_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);


--
-- Name: events fk_events_job_id; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.events
    ADD CONSTRAINT fk_events_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);


--
-- Name: incidents fk_incidents_job_id; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.incidents
    ADD CONSTRAINT fk_incidents_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);


--
-- Name: intents fk_intents_incident_id; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.intents
    ADD CONSTRAINT fk_intents_incident_id FOREIGN KEY (incident_id) REFERENCES public.incidents(id);


--
-- Name: intents fk_intents_job_id; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.intents
    ADD CONSTRAINT fk_intents_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);


--
-- Name: launches fk_launches_job_id; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.launches
    ADD CONSTRAINT fk_launches_job_id FOREIGN KEY (job_id) REFERENCES public.jobs(id);


--
-- Name: launches fk_launches_job_id_attempt; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.launches
    ADD CONSTRAINT fk_launches_job_id_attempt FOREIGN KEY (job_id, attempt) REFERENCES public.attempts(job_id, number);


--
-- Name: nodes fk_nodes_incident_id; Type: FK CONSTRAINT; Schema: public; Owner: -
--

ALTER TABLE ONLY public.nodes
    ADD CONSTRAINT fk_nodes_incident_id FOREIGN KEY (incident_id) REFERENCES public.incidents(id);


--
-- PostgreSQL database dump complete
--


